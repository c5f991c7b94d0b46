"""The codebooks of GGUF's `IQ1`, `IQ2` and `IQ3` types, as defined by ggml."""

import base64
import functools as ft
import zlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Integer, UInt16


class Codebook(NamedTuple):
    """Some points of a grid, each of several dimensions.

    - `number`: the number of dimensions.
    - `levels`: the possible coordinates, in units of `unit`.
    - `unit`: the unit of the coordinates.
    - `text`: an integer of 16 bits for each point, whose digits are the indices of its
        coordinates among `levels`, the first dimension the lowest. The integers ascend,
        and their differences are compressed (zlib, base 85).
    """

    number: int
    levels: tuple[int, ...]
    unit: float
    text: str

    @property
    def points(self) -> UInt16[np.ndarray, " p"]:
        """The integers of the points."""
        return _points(self.text)

    def numbers(self, index: Integer[Array, "*b p"]) -> Int8[Array, "*b p d"]:
        """Returns the coordinates of the points at these indices."""
        bits = 16 // self.number
        shifts = np.arange(0, 16, bits, dtype=np.uint16)
        shifts = shifts.reshape((1,) * index.ndim + (-1,))
        points = jnp.asarray(self.points)
        point = points.at[index].get(mode="promise_in_bounds")[..., None]
        level = ((point >> shifts) & np.uint16(2**bits - 1)).astype(jnp.int8)
        # (On a CPU, a lookup in XLA takes several times as long.)
        first, step = self.levels[0], self.levels[1] - self.levels[0]
        found = np.int8(first) + np.int8(step) * level
        for i, number in enumerate(self.levels):
            more = number - self.levels[i - 1] - step
            if i > 0 and more != 0:
                found = jnp.where(level >= i, found + np.int8(more), found)
        return found


@ft.cache
def _points(text: str) -> UInt16[np.ndarray, " p"]:
    steps = np.frombuffer(zlib.decompress(base64.b85decode(text)), "<u2")
    return np.cumsum(steps, dtype=np.uint16)


# From `ggml-common.h`: `iq1s_grid`, `iq2xxs_grid`, `iq2xs_grid`, `iq2s_grid`,
# `iq3xxs_grid` and `iq3s_grid`.
iq1 = Codebook(
    8,
    (-8, 0, 8),
    1 / 8,
    "c-oCujc(&M3>IZ6c4}XLuysxoU(*5|+U*W|o!*)NJz$6K)~(nx?9InN(UP6)h9ZqEQ55-+{Kz=xU4?(%"
    ")h@UezZdw~xQ^G(@JUu$+k0}LyA?jQZg3HwmiURNgVw!!Z|8Tj^Q61Mx9ECZp_>E#m$%<RP7Wy5q0|Z9"
    "@{ynSd?VnVNc6ZH@eJsC#X7{B-kqaP@hk2AiP8`F-KkWAt7QAY)<(Sfkgf3`3Oha1qK*M20B@6(2gRm4"
    ">U)E-8?$uWeTk6itoUw0mb5>pbYL8O=B;2qC>DUL361Es?vyoE?#&{)&@=RYf}gELYY%i|tB5vueuMV`"
    "$8^L|&JG;!VCdIs=dYFt^O(q5o7o7NWY6~i%jQu9MyJZ+pDc=Qot>%GR<gXZ^8>EZ`x#1qg~*we@Qc}9"
    "-ZJ3=GsUYH0dv`#*P}g=v2FOB_DIub_YTqa?s^iPlw%RKy~I2x1eY=^rn@QAI<_QgtP*Nllw5Fx_k82D"
    "iX-n0v%MXhX_jt_sCr(J8_A+C_)OOIMJ|f$t;OGK<x`AWe(SV;TaLztGwsB^9IP-xJbC_uem`@}$lF`J"
    "x3d_D$E0~TIW>BGpkgnjmha3{vH2JFG%~Nr4dP|WuuAi#&f?!%K1&6OHQ;`;N*d6oirFi=8{ECX+WH>R"
    "I-h83HG{k&T${GWeR43XrO3QFzNai7vz}J24&<!Z{K#C}W>FI!PJ9SjIfBs@$_fLEU(e9-N{hKzD>}=f"
    "cD&|d;5=Dqeu&JPt*;A)@|saYhI`WZhOzM$c|!67;TUrsisnNs{G~J3`ki=wUoe$eK|V;VOH`AMzBoaM"
    "h|WA7k6M*t%k?B?WYdk-Gof+fJ_DEziCZZ6Q5YtVEEK5qcp}e7i96YmBMV1aw)Af9?ey+mV>I0v^X*aB"
    "{Dgg{x>v@~Q1mKabdW2}16d1PpJ`<WBl3jp5-UBgC-F$^kQ_}ce5jr}&bx0%eZ^JNWOsDPPyzWqaxVa7"
    "35lghEUm7WW<S~aC63J7S@tFVT)9i?!x<BGj7g<^EU4YIw#K^~n-jkB|9j2^>5z^4QRkPx02Eunt<R>u"
    "X_wuqoHr~IPwcZUTVX9uIjG7q;=RT{*eoFkJaKPm`7Y3^&7<cTPr|_~e|n8+!0&*bNYpMgk`41tjeU2g"
    "NF)~OHD`Us3R15tzNOU~42+z2KdHv3Yy;f;Px;=?JzY*aO>6z4J31eF%du!&=b4MWMzlRTE8c7Wo9liB"
    "nKIvTZAffB&~$@nEcI0Kf7$~^uFGeXQ=W}STV=ut%8!Bj>Jl;8&-!<7b1!v<{s0cC^W<}vw>rG#NFJM&"
    "N&e@#&e(CpfbEUeAt>uNMHedPyxKA&+KihRddpF+vVOKVzqS*sDxUbg`_6rW)R|~~jZY;HiGI<YI&#DP"
    "VmjkC%rNjjyU<D_n=|~vYWh(tfvR|sF;nX8<ky;KN#ITbP8ewq7n%c6ry9y2s)QSxtDXxi#@Ts&fKk%4"
    "*xPR|sjp|8g3b+9;qg1`h_CTjCJ?*L^GkSHto^7+COd9fj^6)Z=>>O;Z%vASL#MyL!t9sD;QpE9LOBt1"
    "#e60`;LV~D*y~_yNa){j{v`H9hJ=!7?*GI0Go8{0eoE|hkGrq#kd}EZ{R?w{Q3U",
)
iq2_xxs = Codebook(
    8,
    (8, 25, 43),
    1 / 8,
    "c-l>o%_~G<6vlt=9q$<5%`|34k?SKV7I(u;lA4l4*+^L^!%A!<ikg~|KVnKTNhv9mg%S%=w)R%GQp&<c"
    "@!UIC>2}Y#=bYy}=Q-zsLqv~5t!$%wRBt-?j!`Gyt~f@9#UN)HV4Nf?%DNON89y5jaZ%yA0$h@XFz%yA"
    "d~vol!Belxg0Uf{Eu1+_kx}kR@NTPoox=47^VWjt9`#~67W<9yW2<VGGE*Fo;w@0&k*B1}K9`(ZU-bwb"
    "Vsbc<y_Ww8aVbuP?P1Vtn+%&=nA_I>8^>tYyy_<FQj%A{mBtowsw5}}8Vb_Cqv!?WRCz5o%!{Lo2c}uK"
    "K3`0G7i5c!vCO+PIJ(6bvz(c@^3&>n;@kTD{n}_wy^~aQqXr>2xO48({w`Um*wxMYdFI3X{R@{06U?xs"
    "y33JqOq2Pv{%zY?Qg)R`U96jKnv54Y<TX0O5PO=RadI_R`~ssbK5z",
)
iq2_xs = Codebook(
    8,
    (8, 25, 43),
    1 / 8,
    "c-noE!An$O6vcnv8=k#nm>L<!j4_`kgAv8U!9{H(6H+7>fsG^TI4-n^Bnq5}S>(QT5JHG8T86tI2v@CI"
    ")SuwmUCVIc`M!BmGsBDw@6EmU-Fxo2=U(tg=;v|4y%YMcM+V#ci+XZRwy!UhwwyXjb5@eTAtiay5*=}G"
    "pPTejHRpHolrz#5Bh4_o&dPFC->0dWW;V7<E@m=LD6FFMBJL?tRU}|r(TaaQi==V}y0VDKDEcgB8wqva"
    "v}akxGQ!-AD~{w%^3_<+<F>pB-YBcW2}>0H)+ri&LZ`a50*2UQlr_y&awvmhc%-?~Jm87EcPyJg2wC+h"
    "NSz<be9aX$=ux!V-+khC?K;owi$R$>{{h?EwBE;mZJs;JPQT2i6uK+#&@@mkk>aCR7u*bcocf(ED2kP{"
    "SL5-W86g!-;|4-?3&keTgaIF<z#Yma!!4oDsWPvc`=;hM7^N8Fx^7|2<e6pLWclm3lv(wj@{MB_EUW%b"
    "7Z3@{;uZhxJFT9d)qh?7HQA+js|j%pxuH9o(cWJ1i1)_sZPL}}wY!{IQ+|p*N-?*rZlR{VPV+~KRE^J+"
    "Q{gvTs`<iYZ;?;@WS)KL)Z_Ns%MORic_@8tY?R0D1{e8d3cS>GHfohw;jQcgJzLWC49CYy3j",
)
iq2_s = Codebook(
    8,
    (8, 25, 43),
    1 / 8,
    "c-oy+&ubGw6#k}V8Z!(H9=dj8Nc>SnDurM{s)z><Lhx3Qv{G30AQf%NMGB>t2>u7sTh9e=dh;OUPxH&n"
    "Y%;UEv&OQ_%+A|4-@Ny|9}6sDna>g$W?trMC23*bbo(3LUPJO3R%mt#ryA6=nA+?$$3cLkh&<PQXpj|F"
    "k%@Xcik5eR8=KxezNU<L*a>WUSFk9T-!}6|lzo(*7e1;)3yEP$&*Z%Tv4s(?^L-U7)VPlU4rP_+?Gm$o"
    "yi~2%@yPmqA8|<Ijdr$A*R80}|HouZ!*N<-xsOc@MHtgw>Eu}jR*ENhZx9mvkg-_Vc(iDZ;^W6iyL)tC"
    "pTfF{P@B6Qu3hYlV#Y1zSwf7l^D)Jx@OgfUTh5Yi_`(}sV1t+^YaxqyY}+-ppi3FijMPhA?DDMDCLaRk"
    "#Z~ick*rWIMxzQw`?!Y#VRJQhej|D|!6)}Nk#!YSUnf_~>6BiL#iFOHtRK%ZXd=qr75hh?Srgv&8F#TS"
    "ZGQ;6(!Y61$&=;l6??IaSkfnQmz8>q?>G`u$!l!mkdk$gAzPax+s@J{bwcfRo@z$69Ct%gyN#LTXNk$)"
    "!aORR%px)gDsUGW*JsSJKX}Zu4_J|z^zGBpXwOj;F5OKZ@J7_<;U2$acu5{FL>}Fb^mah`b1{<nAMu*2"
    "iCw;()4mI?wkPeG*><EU;s7^U^(l75Z_&jme&G?mQX}D5!CTzHUl`O*2m",
)
iq3_xxs = Codebook(
    4,
    (4, 12, 20, 28, 36, 44, 52, 62),
    1 / 4,
    "c-lpfKTE?<6va<M2?;TV5`s`_48=`C5O)#R;^6K_(vm?Z2NfNQbaK&Bvpa}%7xi-p{_g7^3Gdza&O7Ja"
    "b0hhD39F-sJylox)bk~pg2%3A>Z@6@Q-_$Qr$7blz^OA0b+26*#`Yb)r&2$vHHPi0f_)pVycgAUktPl?"
    ">~q~a)v-pL3R30xT;nm+JNp3NOKp3FUc-MU%i7h<dB#hJ12<XYZi|#Tdrlsk?TpppKOuDw?uBP*YQ2Q3"
    "87sKSIz>i(cHMGbO5Kp;S6ieR;oiq#22zo+(nFY`@j*Kz9m9%H1iI59tP{MfbEPXUcJAL{P3HziNu7Zl"
    "aXZx%rp?`e?s#*@ES+Ks;|ZrXG@D+_>5I<xZhs&mNvSz=eUK~BBblvV3u^yppbhU2zeqQ5",
)
iq3_s = Codebook(
    4,
    (1, 3, 5, 7, 9, 11, 13, 15),
    1.0,
    "c-l>q&2G~`6ooGnC$-yntT-;Hp^h821<^|E5E48d1=<L@L!e5)uKbiOEV?fef_Gqv`U-sacv7m7Gk5OK"
    "Ip^M)nB8CvELb5cu-4f#i&kO}bPlpBP6K<I^2W;Az>|@Y5pDS`?NENl^Xv`fINA!S#aeQ9zhgQ_1TEO6"
    "aGu#zi0+O0?d&DdZ9d13LhrC%31MyvPDfI{%5f#9`G1{3t4KX~O`vunt<Jx$s!D8?;v+k-I?W|ZN@{9q"
    "n7pq-xg$kO6hzeYQ)<Q1&*bAZ%+7w|87ThkYN8GLyn2~mR~e+wdnwY4`tzoE12YOz)X#sMIKD{POxSDi"
    "*TiRdo~y?({jOM}-L%)J-@;!hw$JYo(TO;ws9cgcr2YZX_k4akQ!>8h)s@2DD$@*W??av{O=3qH4iu?%"
    "KWCavnR=UOkIdU&#1NKB)5z?Nu$`}Fwf4?-?L19)Y8QEbCz)PY#oFPG4E4S$A@$KysdL<#{T8{=j>TT4"
    "Te@Js17g7hj<IL<1dR*3%QS~}n@F^?JSLSrUxWQ3bzafKW8Tq33?uY?rmldi<?NY<)NB)N><8a2RhQ~y"
    "ZkPG$&EB&UI#{zu_6apnefumM_Rjv0+u2)i_R;mh9@;Nz{^qV`3#*}TXF5U6l+0k?b*CfEW<fuDoabQo"
    "|LQ&a4coch=SBVlcc4Ex",
)
